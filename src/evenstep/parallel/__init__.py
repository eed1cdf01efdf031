"""Many ranks: reductions and DTensors."""
