"""Layer norm and the root mean square norm, also of a sum with a residual."""
