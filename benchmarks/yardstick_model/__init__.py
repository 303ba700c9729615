"""How the shipped model was made: tokenizer, tasks, training and evaluation."""
