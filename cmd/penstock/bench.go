package main

import "github.com/spf13/cobra"

// newBenchCommand is the place where benchmarks are registered.
func newBenchCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure this machine and this node, as ratios taken in one run",
	}
	return noun(cmd)
}
