"""What would reuse save on this traffic? Prompts of a log, served by the look-up and the tiers without a model."""
