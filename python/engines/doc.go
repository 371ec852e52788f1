// Package engines carries the drivers of inference engines: Python files that run an
// engine in a process of its own and answer calls. The tests beside the files start
// them from the repository. Other programs write Files into a directory and start them
// there.
//
//	vllm_driver.py ──── forks an engine for each call of start
//	 ├─ vllm_copy_spec.py    copies blocks on the CPU for vLLM's offloading
//	 └─ harness/             calls, models, sessions, configurations of connectors
//	dualpath_driver.py ─ starts vllm_driver.py, and replays prompts on a cluster
//	 └─ dualpath_cluster.py  vLLM's servers, node, planner and gateway in network namespaces (netns.py)
//
// It is not a part of the wheel, and it runs nothing itself.
package engines
