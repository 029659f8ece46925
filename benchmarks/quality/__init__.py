"""Cost of the codecs in quality, on a small model that is trained here."""
