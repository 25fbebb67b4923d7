"""Plans: profile and plan files, costs, the partitioner and its search. Torch-free."""
