"""A KV cache tier that outlives the GPU. See README.md in this folder for the map."""
