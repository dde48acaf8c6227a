"""Sampling parameters of other tools that `generation` does not have, each with the reason and what to do instead."""

from collections.abc import Mapping
from typing import Any

_PENALTY = (
    "a penalty makes the policy that samples another one than the policy that is trained, and what it has counted is "
    "forgotten when an interrupted response goes on as part of the prompt; reward less of what repeats"
)
_SEARCH = (
    "beam search does not sample from the policy: its responses can neither be trained on, nor continued at "
    "rollout_recovery level 'prefix'; sample with temperature and top_p"
)
_SEVERAL = "how many responses a prompt gets is algorithm.num_generations_per_prompt, and every one of them counts"
_CUT = (
    "it changes which tokens can be drawn in a way that the trainer can't compute from the logits; use temperature or "
    "top_p"
)

REFUSED_SAMPLING = {
    "use_beam_search": _SEARCH,
    "beam_width": _SEARCH,
    "length_penalty": _SEARCH,
    "best_of": _SEVERAL,
    "n": _SEVERAL,
    "seed": "it would be a plain seed of the engine, which can't go on in the middle of a response; seeds come from "
    "the run's seed: set seed (at the top), and generation.seeding for how it is used",
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _PENALTY,
    "top_k": _CUT,
    "min_p": _CUT,
    "logit_bias": _CUT,
    "min_tokens": "end tokens would be forbidden up to a length that is counted anew when an interrupted response goes "
    "on as part of the prompt, and the trainer would not know; reward longer responses",
    "stop": "texts are found by a detokenizer, which the generators do without; the task says which tokens end a "
    "response (stop_token_ids)",
    "stop_token_ids": "the task says which tokens end a response: set them there",
    "max_tokens": "it is called max_new_tokens here",
}


def refuse_sampling(given: Mapping[str, Any]) -> None:
    """Raises ValueError for the first key that is one of these."""
    for name in given:
        if name in REFUSED_SAMPLING:
            raise ValueError(f"generation.{name} is not supported: {REFUSED_SAMPLING[name]}")
