"""FLOPs, bytes, peaks and the roofline. Pure: mappings and columns in, figures out."""
