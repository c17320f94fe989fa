"""Training the demonstration models: corpus, tokenizer, target, EAGLE-2 head, draft model.

Knows torch and transformers; knows nothing of the pipeline, its tree or its strategies.
"""
