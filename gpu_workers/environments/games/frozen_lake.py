"""`frozen_lake`: gymnasium's slippery 4x4 lake, walked by the letters l, d, r and u."""

from typing import Any, ClassVar

import numpy as np

from gpu_workers.environments.gymnasium_text import GymnasiumText
from gpu_workers.environments.interface import Json

_MOVES = "ldru"  # in the order of gymnasium's actions
_BEST_MOVES = ("luuu", "l-l-", "udl-", "-rd-")  # by row and column; on ice that slips, away from the holes


class FrozenLake(GymnasiumText):
    """`r1c2?` asks for a move from row 1, column 2; the first observation shows the map before it.

    Reward: 1 on reaching the goal. Another text than one of the four letters loses the turn.
    """

    name: ClassVar[str] = "frozen_lake"
    max_turns: ClassVar[int] = 32  # on the slippery ice half of the best walks take longer than 20
    gymnasium_id: ClassVar[str] = "FrozenLake-v1"
    options: ClassVar[dict[str, Any]] = {"map_name": "4x4", "is_slippery": True}

    def export(self, game: Any) -> Json:
        """The field one stands on, numbered by rows, and the last move."""
        return {"field": int(game.s), "last_move": None if game.lastaction is None else int(game.lastaction)}

    def fill(self, game: Any, state: Json) -> None:
        """The same two."""
        game.s, game.lastaction = state["field"], state["last_move"]

    def action_of(self, text: str) -> int | None:
        """One of the letters l, d, r and u."""
        return _MOVES.index(text) if len(text) == 1 and text in _MOVES else None

    def describe(self, game: Any, *, first: bool) -> str:
        """The position, after the map when it is the first time."""
        row, column = divmod(int(game.s), game.ncol)
        rows = "|".join(b"".join(line).decode().lower().replace("f", ".") for line in game.desc)
        return f"{rows} r{row}c{column}?" if first else f"r{row}c{column}?"

    def demonstrate(self, state: Json, rng: np.random.Generator, noise: float) -> str:
        """The best move, or any with probability `noise`."""
        row, column = divmod(state["game"]["field"], 4)
        blind, move = rng.random() < noise, int(rng.integers(len(_MOVES)))
        return _MOVES[move] if blind else _BEST_MOVES[row][column]
