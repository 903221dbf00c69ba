"""From URL lists to batches: sample, download, captions, shards, loader."""
