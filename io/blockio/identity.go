package blockio

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Identity returns the line that a process records in the lock file of a volume, by which an
// operator can find and stop the process. startedAt is the start time of the process. The line
// contains the words of the command line before the first flag only: flags may contain secrets, and
// other users can read the lock file.
func Identity(startedAt time.Time) string {
	host, err := os.Hostname()
	if err != nil {
		host = "an unnamed host"
	}
	return OneLine(fmt.Sprintf("%s on %s, pid %d, since %s", command(os.Args), host, os.Getpid(), startedAt.UTC().Format(time.RFC3339)))
}

// command returns the program's base name and its subcommands.
func command(args []string) string {
	if len(args) == 0 {
		return "an unnamed command"
	}
	words := []string{filepath.Base(args[0])}
	for _, a := range args[1:] {
		if strings.HasPrefix(a, "-") {
			break
		}
		words = append(words, a)
	}
	return strings.Join(words, " ")
}

// identityMax is the longest identity kept, in bytes.
const identityMax = 512

// OneLine prepares an identity for a lock file: control characters become spaces, and the text is
// cut after 512 bytes.
func OneLine(identity string) string {
	identity = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, identity)
	if len(identity) > identityMax {
		identity = strings.ToValidUTF8(identity[:identityMax], "")
	}
	return strings.TrimSpace(identity)
}
