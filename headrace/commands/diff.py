"""`headrace diff`: a measured timeline laid on a predicted one."""
