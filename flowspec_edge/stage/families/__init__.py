"""The decoder layers of all families: one class for each part, on every device, in stages and in draft heads.

What differs between families is data (``model.families.LayerForm``).  Modules and parameters have the names that
checkpoints give them; once the weights are loaded, projections of the same rows become one product.
"""
