"""The session: the patches that a user chose in a notebook, as data."""
