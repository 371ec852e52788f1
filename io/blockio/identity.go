package blockio

import (
	"fmt"
	"os"
	"strings"
	"time"
)

// Identity returns the line that a process leaves in a volume's lock: who it is,
// in words that let a person find and stop it. startedAt is when it started.
func Identity(startedAt time.Time) string {
	host, err := os.Hostname()
	if err != nil {
		host = "an unnamed host"
	}
	return OneLine(fmt.Sprintf("%s on %s, pid %d, since %s", strings.Join(os.Args, " "), host, os.Getpid(), startedAt.UTC().Format(time.RFC3339)))
}

// identityMax is the longest identity kept, in bytes.
const identityMax = 512

// OneLine makes an identity fit for a lock file: control characters become
// spaces and what is beyond 512 bytes is cut.
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
