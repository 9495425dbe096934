"""One writer a format: the keys that a change concerns, and why the format cannot say the rest."""
