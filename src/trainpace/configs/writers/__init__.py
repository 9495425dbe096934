"""One writer per format, with the reasons for the settings that the format cannot state."""
