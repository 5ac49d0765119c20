"""Model files on their way in: checked before anything in them is believed."""
