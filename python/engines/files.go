package engines

import "embed"

// Files are the drivers of vLLM and of clusters of vLLM's servers, and the modules that they import.
//
//go:embed vllm_driver.py vllm_copy_spec.py dualpath_driver.py dualpath_cluster.py dualpath_worker.py netns.py harness/*.py
var Files embed.FS
