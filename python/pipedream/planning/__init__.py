"""This package makes plans: it has profile and plan files, costs, the partitioner and its search.
Torch-free.
"""
