package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/server/config"
)

// world is the environment of a command: standard streams, environment variables, and the wait for
// a node that is starting.
type world struct {
	in io.Reader
	// ended is closed when the command must end. run sets it.
	ended   <-chan struct{}
	out     io.Writer
	err     io.Writer
	environ []string
	// startWithin is the time for which a client command retries while a node refuses connections.
	startWithin time.Duration
	// progressEvery is the interval between lines of progress where err is not a terminal. 0: no lines.
	progressEvery time.Duration
	// hangups delivers SIGHUP to a process that serves, until the returned function is called. Nil:
	// the process does not handle SIGHUP.
	hangups func() (<-chan os.Signal, func())
}

// env returns a variable of the environment, or "".
func (w world) env(name string) string {
	for i := len(w.environ) - 1; i >= 0; i-- {
		if k, v, ok := strings.Cut(w.environ[i], "="); ok && k == name {
			return v
		}
	}
	return ""
}

// The exit codes, as doc.go and docs/cli.md list them.
const (
	exitOK = iota
	exitFailed
	exitUsage
	exitMiss
	exitBusy
	exitEnded
)

var (
	// errMiss: the requested object does not exist, or not all of it.
	errMiss = errors.New("not found")
	// errBusy: the node refused a request because a limit was reached.
	errBusy = errors.New("the node is busy; try again")
	// errEnded: another command has ended the work that this one waited for.
	errEnded = errors.New("another command has ended it")
	// errReported: the command failed, and its output has the reason.
	errReported = errors.New("failed")
)

// run executes one command line and returns its exit code.
func run(ctx context.Context, w world, args []string) int {
	w.ended = ctx.Done()
	root := newRootCommand(w)
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitOK
	}
	code, text := exitCode(err), explain(err)
	var by signalError
	if errors.As(context.Cause(ctx), &by) {
		code, text = by.exitCode(), strings.ReplaceAll(text, context.Canceled.Error(), by.Error())
	}
	if outputOf(cmd).json || asksForJSON(args) {
		if !errors.Is(err, errReported) {
			// If standard error cannot be written, the error cannot be reported.
			_ = output{w: w.err}.emitLine(jsonError{Error: text, ExitCode: code})
		}
		return code
	}
	if !errors.Is(err, errReported) {
		fmt.Fprintf(w.err, "penstock: %s\n", text)
	}
	if code == exitUsage {
		fmt.Fprintf(w.err, "Run '%s --help' for usage.\n", cmd.CommandPath())
	}
	return code
}

// asksForJSON reports whether args contain --format json. It parses args again, because cobra stops
// at the first invalid flag, and --format may come after that flag.
func asksForJSON(args []string) bool {
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	flags.ParseErrorsAllowlist.UnknownFlags = true
	flags.SetOutput(io.Discard)
	format := &formatFlag{}
	flags.Var(format, "format", "")
	flags.BoolP("help", "h", false, "")
	_ = flags.Parse(args) // the flags before an invalid one are parsed
	return format.value == formatJSON
}

// jsonError is the form of an error with --format json: one line on standard error.
type jsonError struct {
	Error    string `json:"error"`
	ExitCode int    `json:"exit_code"`
}

// negativeNumber matches pflag's error for an argument like -1.
var negativeNumber = regexp.MustCompile(`^unknown shorthand flag: '[0-9]' in (-.+)$`)

// exitCode returns the exit code for an error.
func exitCode(err error) int {
	code := status.Code(err)
	switch {
	case errors.As(err, &usageError{}), errors.Is(err, config.ErrConfig), cobraUsage(err):
		return exitUsage
	case errors.Is(err, errMiss), errors.Is(err, client.ErrNotFound), code == codes.NotFound:
		return exitMiss
	case errors.Is(err, errBusy), code == codes.ResourceExhausted:
		return exitBusy
	case errors.Is(err, errEnded):
		return exitEnded
	}
	return exitFailed
}

// cobraUsage reports whether err is a usage error of cobra. Cobra has no type for these
// errors, so cobraUsage compares their text.
func cobraUsage(err error) bool {
	for _, prefix := range []string{"unknown command", "required flag", "if any flags in the group", "at least one of the flags in the group"} {
		if strings.HasPrefix(err.Error(), prefix) {
			return true
		}
	}
	return false
}

// explain returns the text of an error for the user, without the parts that gRPC adds. If the node
// is unreachable, explain adds a hint what to check.
func explain(err error) string {
	text := dialWords(err.Error())
	hint, reached := serverHint, ""
	var hinted *hintedError
	if errors.As(err, &hinted) {
		hint = "\n(" + hinted.hint + ")"
		reached = hint
	}
	if errors.Is(err, client.ErrUnavailable) {
		return text + hint
	}
	st, ok := status.FromError(err)
	if !ok || st.Code() == codes.Unknown {
		return text + reached
	}
	// Only the text of the gRPC status is replaced; the text around it is kept.
	text = strings.Replace(text, dialWords(st.Err().Error()), dialWords(st.Message()), 1)
	if i := strings.Index(text, "rpc error: code = "); i >= 0 {
		if j := strings.Index(text[i:], " desc = "); j >= 0 {
			text = text[:i] + text[i+j+len(" desc = "):]
		}
	}
	switch st.Code() {
	case codes.Unavailable:
		return text + hint
	case codes.Unimplemented:
		return text + "\n(the node is of another version; compare `penstock version` with `penstock status`)"
	case codes.DeadlineExceeded:
		return text + "\n(the node did not answer within --timeout)"
	}
	return text
}

const serverHint = "\n(is `penstock serve` running, and is --server its address?)"

// failedDial is the text of gRPC about a failed dial; its group is the system's error.
var failedDial = regexp.MustCompile(`connection error: desc = "transport: Error while dialing: ((?:[^"\\\n]|\\.)*)"`)

// dialWords removes the text that gRPC adds to a failed dial, and keeps the system's error.
func dialWords(text string) string { return failedDial.ReplaceAllString(text, "$1") }

// usagef returns an error about the command line.
func usagef(format string, args ...any) error {
	return usageError{fmt.Errorf(format, args...)}
}

// usageError means that the command line is invalid.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

func newRootCommand(w world) *cobra.Command {
	root := &cobra.Command{
		Use:   "penstock",
		Short: "Keep KV-cache blocks on SSD, find the longest prefix, give the bytes back",
		Long: `Penstock keeps the KV cache of language models on SSDs: blocks in, longest cached
prefix out, every byte verified.

Exit codes: 0 success; 1 failure; 2 the command line or the configuration is
invalid; 3 the requested object does not exist, or not all of it; 4 the node is busy, try
again; 5 another command has ended the work that this one waited for; 130 interrupted
(Ctrl-C). With --format json an error is one line of JSON on standard error.`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetIn(w.in)
	root.SetOut(w.out)
	root.SetErr(w.err)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		if m := negativeNumber.FindStringSubmatch(err.Error()); m != nil {
			return usagef("%s: must not be negative; put -- before an argument that begins with -", m[1])
		}
		return usageError{err}
	})
	addFormatFlag(root, w)
	root.AddGroup(
		&cobra.Group{ID: groupNode, Title: "The node:"},
		&cobra.Group{ID: groupCache, Title: "What it holds:"},
		&cobra.Group{ID: groupCluster, Title: "The cluster:"},
		&cobra.Group{ID: groupMeasure, Title: "Under load:"},
	)
	add := func(group string, cmds ...*cobra.Command) {
		for _, c := range cmds {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add(groupNode, newServeCommand(w), newStatusCommand(w), newTopCommand(w), newConfigCommand(w), newDoctorCommand(w), newStoreCommand(w), newVolumeCommand(w), newClusterCommand(w), newNICCommand(), newVersionCommand(w))
	add(groupCache, newNamespaceCommand(w), newBlockCommand(w), newPrefixCommand(w), newPinCommand(w), newUnpinCommand(w), newEvictCommand(w), newScrubCommand(w), newEventsCommand(w))
	add(groupCluster, newGatewayCommand(w), newPlannerCommand(w), newPlanCommand(w), newSimCommand(w), newMetricsCommand())
	add(groupMeasure, newDemoCommand(w), newTraceCommand(w), newBenchCommand(w), newFabricCommand(w), newProfileCommand(w))
	noun(root)
	root.InitDefaultCompletionCmd()
	root.InitDefaultHelpCmd()
	for _, cmd := range root.Commands() {
		switch cmd.Name() {
		case "completion":
			noun(cmd)
		case "help":
			cmd.Args = knownTopic(root)
		}
	}
	completeRest(root)
	return root
}

const (
	groupNode    = "node"
	groupCache   = "cache"
	groupCluster = "cluster"
	groupMeasure = "measure"
)

// noun adds subcommands to a command, and makes the command return a usage error for any other
// argument. Cobra's default is to print the help and succeed.
func noun(cmd *cobra.Command, verbs ...*cobra.Command) *cobra.Command {
	cmd.AddCommand(verbs...)
	cmd.Args = cobra.ArbitraryArgs
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return cmd.Help()
		}
		hint := ""
		if near := cmd.SuggestionsFor(args[0]); args[0] != "" && len(near) > 0 { // every name begins with ""
			hint = "; did you mean " + strings.Join(near, " or ") + "?"
		}
		return usagef("unknown command %q for %q%s", args[0], cmd.CommandPath(), hint)
	}
	return cmd
}

// knownTopic returns a check that the arguments of help name a command.
func knownTopic(root *cobra.Command) cobra.PositionalArgs {
	return func(_ *cobra.Command, topic []string) error {
		cmd, rest, err := root.Find(topic)
		if err == nil && len(rest) > 0 && (cmd == root || cmd.HasSubCommands()) {
			err = fmt.Errorf("unknown command %q for %q", rest[0], cmd.CommandPath())
		}
		if err != nil {
			return usageError{err}
		}
		return nil
	}
}

// args wraps a check of positional arguments, so that its error is a usage error.
func args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, given []string) error {
		if err := check(cmd, given); err != nil {
			return usageError{fmt.Errorf("%w (usage: %s)", err, cmd.UseLine())}
		}
		return nil
	}
}

// sizeFlag is a flag with a number of bytes, like 512MiB.
type sizeFlag struct{ bytes *int64 }

func (f sizeFlag) String() string {
	if f.bytes == nil || *f.bytes == 0 {
		return "0"
	}
	return config.Size(*f.bytes).String()
}

func (f sizeFlag) Set(text string) error {
	v, err := config.ParseSize(text)
	if err != nil {
		return err
	}
	*f.bytes = int64(v)
	return nil
}

func (f sizeFlag) Type() string { return "size" }

// Annotations of flags.
const (
	// ownRange: the command checks the range of the number, so checkFlag does not.
	ownRange = "penstock: range is checked by the command"
	// emptyAllowed: the value of the flag may be empty.
	emptyAllowed = "penstock: may be empty"
	// fixedValues are the only values of the flag.
	fixedValues = "penstock: fixed values"
)

// annotate sets an annotation of a flag that is already defined on cmd.
func annotate(cmd *cobra.Command, flag, annotation string, values ...string) {
	flags := cmd.Flags()
	if flags.Lookup(flag) == nil {
		flags = cmd.PersistentFlags()
	}
	if err := flags.SetAnnotation(flag, annotation, values); err != nil {
		panic(err) // our bug: the flag is not defined
	}
}

// checkFlags returns a usage error for the first flag that checkFlag refuses.
func checkFlags(flags *pflag.FlagSet) (err error) {
	flags.Visit(func(f *pflag.Flag) {
		if err == nil {
			err = checkFlag(f)
		}
	})
	return err
}

// checkFlag returns a usage error for values that would have an unexpected effect. A number below 0
// would mean no limit. An empty text would mean that the flag is not given, although the usual
// cause is an unset variable in a script. A flag with fixed values accepts only these values.
func checkFlag(f *pflag.Flag) error {
	has := func(annotation string) bool {
		_, ok := f.Annotations[annotation]
		return ok
	}
	var n float64
	switch f.Value.Type() {
	case "string":
		text := f.Value.String()
		if values := f.Annotations[fixedValues]; values != nil && !slices.Contains(values, text) {
			return usagef("--%s %q: want %s", f.Name, text, alternatives(values))
		}
		if text == "" && !has(emptyAllowed) {
			return usagef("--%s %q: must not be empty; omit the flag instead", f.Name, text)
		}
	case "stringSlice":
		if v, ok := f.Value.(pflag.SliceValue); ok && (len(v.GetSlice()) == 0 || slices.Contains(v.GetSlice(), "")) {
			return usagef("--%s %q: must not be empty", f.Name, strings.Join(v.GetSlice(), ","))
		}
	case "int", "int64", "float64":
		n, _ = strconv.ParseFloat(f.Value.String(), 64) // pflag has parsed it
	case "duration":
		d, _ := time.ParseDuration(f.Value.String())
		n = d.Seconds()
	}
	if (n < 0 || math.IsNaN(n) || math.IsInf(n, 0)) && !has(ownRange) {
		return usagef("--%s %s: must not be negative", f.Name, f.Value)
	}
	return nil
}

// alternatives returns the values as text, like "a, b or c".
func alternatives(values []string) string {
	last := len(values) - 1
	if last == 0 {
		return values[0]
	}
	return strings.Join(values[:last], ", ") + " or " + values[last]
}
