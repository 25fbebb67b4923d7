"""Between workers: how they find each other, channels, keys, codecs, signs of life."""
