"""This package connects workers: it has the rendezvous, channels, keys, codecs and signs of life."""
