"""What the format accessory is made of: plugins, parameters, names, shards."""
