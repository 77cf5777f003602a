"""Quantized weights (`packed_weights`), and how bitsandbytes packs them (`bitsandbytes_weights`)."""
