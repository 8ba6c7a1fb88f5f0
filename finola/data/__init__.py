"""Pictures in, batches out: strict decoding, folders and shards, and loaders that resume exactly."""
