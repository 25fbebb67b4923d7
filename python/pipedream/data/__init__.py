"""The minibatches, as every stage that reads them reads them."""
