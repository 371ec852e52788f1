package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// completeValues completes a flag to the given values, and not to file names. Other
// values of a flag that holds a string are refused.
func completeValues(cmd *cobra.Command, flag string, values ...string) {
	annotate(cmd, flag, fixedValues, values...)
	completeFlag(cmd, flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}

// completeList completes a flag whose value is a comma-separated list of the given values. Values
// that are in the list already are not offered.
func completeList(cmd *cobra.Command, flag string, values ...string) {
	completeFlag(cmd, flag, func(_ *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
		list := ""
		if i := strings.LastIndexByte(typed, ','); i >= 0 {
			list = typed[:i+1]
		}
		var offers []string
		for _, v := range values {
			if !slices.Contains(strings.Split(list, ","), v) {
				offers = append(offers, list+v)
			}
		}
		return offers, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
	})
}

// completeFlag registers the completion of a flag. It panics if the flag is not defined
// or has a completion already.
func completeFlag(cmd *cobra.Command, flag string, complete cobra.CompletionFunc) {
	if err := cmd.RegisterFlagCompletionFunc(flag, complete); err != nil {
		panic(err)
	}
}

// Flags whose value is the path of a file or of a directory. Flags whose name ends in
// -file are files too.
var (
	fileFlags = []string{
		"auth-client-ca", "auth-tls-cert", "auth-tls-key", "ca", "cert", "cluster", "config", "cpuprofile", "into", "key",
		"local-socket", "out", "picture", "profile", "qos", "record", "samples", "save", "trace", "write",
	}
	dirFlags = []string{"data", "dir", "sysfs"}
)

// completeRest registers the default completions of a command tree: file names for flags that take
// a path and for commands that take arguments, and no completion for other flags and commands.
// Cobra's own default is file names for all.
func completeRest(cmd *cobra.Command) {
	flags := func(f *pflag.Flag) {
		_, completed := cmd.GetFlagCompletionFunc(f.Name)
		switch {
		case completed, slices.Contains(fileFlags, f.Name), strings.HasSuffix(f.Name, "-file"):
		case slices.Contains(dirFlags, f.Name):
			completeFlag(cmd, f.Name, func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
				return nil, cobra.ShellCompDirectiveFilterDirs
			})
		default:
			completeFlag(cmd, f.Name, cobra.NoFileCompletions)
		}
	}
	cmd.PersistentFlags().VisitAll(flags)
	cmd.LocalNonPersistentFlags().VisitAll(flags)
	// A command with subcommands refuses other arguments in its RunE.
	takesNone := cmd.HasSubCommands() || cmd.Args != nil && cmd.Args(cmd, []string{"x"}) != nil && cmd.Args(cmd, []string{"x", "x"}) != nil
	if cmd.ValidArgsFunction == nil && takesNone {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	for _, sub := range cmd.Commands() {
		completeRest(sub)
	}
}
