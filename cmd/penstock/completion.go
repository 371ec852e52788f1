package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// completeValues makes the shell offer the values of a flag, and no file names.
func completeValues(cmd *cobra.Command, flag string, values ...string) {
	completeFlag(cmd, flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}

// completeList is completeValues for a flag that takes a list with commas: what is
// in the list already is not offered again.
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

// completeFlag makes complete answer for a flag. A flag that was not defined
// before, or is completed already, is our bug.
func completeFlag(cmd *cobra.Command, flag string, complete cobra.CompletionFunc) {
	if err := cmd.RegisterFlagCompletionFunc(flag, complete); err != nil {
		panic(err)
	}
}

// The flags whose value is the name of a file or of a directory, other than those
// whose name ends in -file.
var (
	fileFlags = []string{
		"auth-client-ca", "auth-tls-cert", "auth-tls-key", "ca", "cert", "cluster", "config", "cpuprofile", "into", "key",
		"local-socket", "out", "picture", "profile", "qos", "record", "samples", "save", "trace", "write",
	}
	dirFlags = []string{"data", "dir", "sysfs"}
)

// completeRest decides what the shell offers where a command of the tree does not
// say: file names for flags that take one and for commands that take arguments, and
// nothing for the others. Without it the shell offers file names everywhere.
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
	// A command with verbs refuses every other argument in its RunE.
	takesNone := cmd.HasSubCommands() || cmd.Args != nil && cmd.Args(cmd, []string{"x"}) != nil && cmd.Args(cmd, []string{"x", "x"}) != nil
	if cmd.ValidArgsFunction == nil && takesNone {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	for _, sub := range cmd.Commands() {
		completeRest(sub)
	}
}
