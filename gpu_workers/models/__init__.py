"""The tiny model and its tokenizer, made at set-up."""
