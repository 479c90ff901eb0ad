"""Other people's training loops: Hugging Face's Trainer, Lightning, timm. Each is imported where it is needed."""
