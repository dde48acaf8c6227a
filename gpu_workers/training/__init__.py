"""The trainer ranks: torch, one actor per rank; losses and advantages are pure functions."""
