"""This package connects workers: it has the rendezvous, channels, addresses, keys and signs of life."""
