"""Results of other rooms, gathered and put into words, tables and plots.

- `unit_streams`: the streams of a coded file for the model of the decode unit;
- `unit_simulation`: a whole model through that unit, and where to decode it; `unit_plots`: the same as pictures.
"""
