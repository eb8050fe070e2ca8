"""From logits to tokens: counter-based noise, the seeded sampler, and when a sequence stops."""
