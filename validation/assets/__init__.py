"""Files shipped with the validation harness: the small model and an excerpt of prose."""
