package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// rewriting reports whether -rewrite was given; datadriven defines the flag.
func rewriting() bool {
	f := flag.Lookup("rewrite")
	return f != nil && f.Value.String() == "true"
}

// TestDocumentation: docs/cli.md equals the help of the commands. To regenerate the page: go test
// ./cmd/penstock -run TestDocumentation -rewrite
func TestDocumentation(t *testing.T) {
	path := filepath.Join(testkit.RepositoryRoot(t), "docs", "cli.md")
	want := cliPage(newRootCommand(world{out: io.Discard, err: io.Discard}))
	if rewriting() {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("docs/cli.md differs from the commands' help; rewrite it: go test ./cmd/penstock -run TestDocumentation -rewrite")
	}
}

// cliPage returns the page with the help of every command.
func cliPage(root *cobra.Command) string {
	var b strings.Builder
	b.WriteString("# The commands\n\n")
	b.WriteString("This page is made from the commands' own help (`go test ./cmd/penstock -run TestDocumentation -rewrite`).\n\n")
	fmt.Fprintf(&b, "%s\n\nEvery command takes `--format table|json` (environment: `PENSTOCK_FORMAT`). Results go to standard output; errors,\nwarnings and progress go to standard error. `penstock completion bash|zsh|fish` prints a completion script, which\nknows the namespaces of the node.\n\n", root.Long)
	each(root, func(c *cobra.Command) {
		if c != root {
			section(&b, c)
		}
	})
	return b.String()
}

// each visits the commands, parents first.
func each(c *cobra.Command, f func(*cobra.Command)) {
	if c.Hidden || c.Name() == "help" || c.Name() == "completion" {
		return
	}
	f(c)
	for _, sub := range c.Commands() {
		each(sub, f)
	}
}

func section(b *strings.Builder, c *cobra.Command) {
	fmt.Fprintf(b, "## %s\n\n", c.CommandPath())
	if c.Long != "" {
		fmt.Fprintf(b, "%s\n\n", strings.TrimSpace(mark(c.Long)))
	} else {
		fmt.Fprintf(b, "%s.\n\n", strings.TrimSuffix(c.Short, "."))
	}
	// Of the commands with subcommands, only pin takes arguments.
	if !c.HasAvailableSubCommands() || strings.Contains(c.Use, " ") {
		fmt.Fprintf(b, "    %s\n\n", c.UseLine())
	}
	if c.Example != "" {
		fmt.Fprintf(b, "%s\n\n", indent(c.Example))
	}
	if flags := flagLines(c.LocalFlags()); flags != "" {
		fmt.Fprintf(b, "```text\n%s```\n\n", flags)
	}
}

// mark keeps the indentation of the indented parts of a help text.
func mark(text string) string {
	lines := strings.Split(text, "\n")
	for i, l := range lines {
		if strings.HasPrefix(l, "  ") {
			if lines[i-1] != "" && !strings.HasPrefix(lines[i-1], "    ") {
				lines[i] = "\n    " + strings.TrimSpace(l)
				continue
			}
			lines[i] = "    " + strings.TrimSpace(l)
		}
	}
	return strings.Join(lines, "\n")
}

func indent(text string) string {
	var out []string
	for _, l := range strings.Split(text, "\n") {
		out = append(out, "    "+strings.TrimSpace(l))
	}
	return strings.Join(out, "\n")
}

func flagLines(set *pflag.FlagSet) string {
	var b strings.Builder
	set.VisitAll(func(f *pflag.Flag) {
		if f.Name == "help" || f.Name == "format" || f.Hidden {
			return
		}
		def := ""
		if f.DefValue == os.TempDir() {
			def = " (default the system's temporary directory)"
		} else if f.DefValue != "" && f.DefValue != "0" && f.DefValue != "false" && f.DefValue != "[]" {
			def = " (default " + f.DefValue + ")"
		}
		fmt.Fprintf(&b, "--%-22s %s%s\n", f.Name, f.Usage, def)
	})
	return b.String()
}

// TestCommandsDocumentThemselves: every command and flag has a help text, and no two flags of one
// command have different spellings of the same name.
func TestCommandsDocumentThemselves(t *testing.T) {
	each(newRootCommand(world{out: io.Discard, err: io.Discard}), func(c *cobra.Command) {
		if c.Short == "" || strings.HasSuffix(c.Short, ".") {
			t.Errorf("%s: short help %q", c.CommandPath(), c.Short)
		}
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if f.Usage == "" {
				t.Errorf("%s --%s has no help", c.CommandPath(), f.Name)
			}
		})
	})
}

// TestExamplesAreRight: every example in a help text is an existing command with valid flags and
// arguments.
func TestExamplesAreRight(t *testing.T) {
	shown := 0
	each(newRootCommand(world{out: io.Discard, err: io.Discard}), func(c *cobra.Command) {
		for line := range strings.Lines(c.Example) {
			for command := range strings.SplitSeq(line, "&&") {
				command, _, _ = strings.Cut(command, ">")
				words := exampleWords(command)
				if len(words) == 0 || words[0] != "penstock" {
					t.Errorf("%s: example %q is no command of ours", c.CommandPath(), line)
					continue
				}
				shown++
				// Flags keep their values, so each example gets a new tree.
				root := newRootCommand(world{out: io.Discard, err: io.Discard})
				found, rest, err := root.Find(words[1:])
				if err == nil {
					err = found.ParseFlags(rest)
				}
				if err == nil {
					err = found.ValidateArgs(found.Flags().Args())
				}
				if err == nil {
					err = found.ValidateRequiredFlags()
				}
				if err != nil {
					t.Errorf("%s: example %q: %v", c.CommandPath(), strings.TrimSpace(line), err)
				}
			}
		}
	})
	if shown < 20 {
		t.Errorf("%d examples were checked", shown)
	}
}

// exampleWords splits a line at blanks outside of double quotes, which is enough for the examples.
func exampleWords(line string) (words []string) {
	for i, part := range strings.Split(strings.TrimSpace(line), `"`) {
		if i%2 == 1 {
			words = append(words, part)
			continue
		}
		words = append(words, strings.Fields(part)...)
	}
	return words
}
