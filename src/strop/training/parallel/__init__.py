"""Many ranks, one trainer: who shares what, and how gradients stay those of one process."""
