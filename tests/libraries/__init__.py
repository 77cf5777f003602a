"""Models of libraries outside transformers, and of tutorials: whether components are what the models' own code says."""
