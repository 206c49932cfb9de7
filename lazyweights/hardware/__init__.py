"""A model of the decode unit: cycles, area, energy, devices. On plain streams and counts; knows no files.

- `unit_config`: parameters of a unit, the streams it reads, what a run counts;
- `engine_reference`: the cycle model in plain Python; `engine_kernels`: the same in numba, equal to the cycle;
- `stream_variants`: other streams for the same symbols (balanced lanes, longer tiles, demand layout);
- `rans_engine`: rANS lanes in the same frame;
- `area`: components, area and energy; `devices`: machines; `placement`: where to decode.

Every figure that comes out of this room is modelled.
"""
