"""Results of other rooms, gathered and put into words, tables and plots.

- `report_files`: a whole report on a model, from measuring (`model_report`, `judge`, `calibration`) and keeping points
  (`points`, `tensor_facts`) over comparing them (`comparison`) to what is written (`report_data`, `report_tables`,
  `report_markdown`, `report_page` with `report_plots` and `inline_svg`);
- `unit_streams`: the streams of a coded file for the model of the decode unit;
- `unit_simulation`: a whole model through that unit, and where to decode it; `unit_plots`: the same as pictures.
"""
