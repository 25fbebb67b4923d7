"""The links between workers: rendezvous, channels, keys, codecs, signs of life."""
