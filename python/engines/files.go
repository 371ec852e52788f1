package engines

import "embed"

// Files are the driver of vLLM and the modules that the driver imports.
//
//go:embed vllm_driver.py vllm_copy_spec.py harness/*.py
var Files embed.FS
