"""Files shipped with the validation harness: the small model, its recipe and an excerpt of prose."""
