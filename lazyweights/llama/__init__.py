"""The bridge to llama.cpp, through the optional package llama-cpp-python.

- `library`: loads it, or says in one sentence what to install;
- `memory_file`: a coded file as an anonymous memory file that any program can open;
- `model`: a loaded model, its tokenizer, and contexts that evaluate tokens;
- `perplexity`: perplexity and KL divergence; on `chunks` of a text, by their `log_probs`, with the base's in a `logits_file`,
  summed up in `divergence`.
- `sampler`, `generation`: text from a model, by llama.cpp's samplers;
- `python_model`: ``llama_cpp.Llama`` from a coded file;
- `memory_use`: what all of it takes.

Nothing here is imported before it is needed.
"""
