"""A node that does not exist, with its exact truth kept beside."""
