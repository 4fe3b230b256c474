"""The processes behind the doors: supervisor, tokenizer, scheduler, worker, detokenizer."""
