"""Chaos testing: the real system on a tiny task under seeded faults, resumed and audited after each."""
