"""Plans: profile and plan files, the partitioner, the simulator and its pictures. Torch-free."""
