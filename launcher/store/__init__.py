"""What a run leaves on disk: checkpoint.py, weights.py, and the safetensors of tensor_file.py."""
