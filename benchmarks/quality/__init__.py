"""What the codecs cost in quality, on a small model that is trained here."""
