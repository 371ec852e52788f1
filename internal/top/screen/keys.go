package screen

// Key is a key of the keyboard: a printable character, or one of the constants.
type Key rune

// Keys that send escape sequences.
const (
	Up Key = -1 - iota
	Down
	Left
	Right
	PageUp
	PageDown
	Home
	End
)

// sequences are the escape sequences of keys after ESC and [ or O.
var sequences = map[string]Key{
	"A": Up, "B": Down, "C": Right, "D": Left, "H": Home, "F": End,
	"1~": Home, "4~": End, "5~": PageUp, "6~": PageDown, "7~": Home, "8~": End,
}

// Keys returns the keys in the bytes that a terminal sent, and the rest: an escape sequence that is
// not complete. Sequences of other keys are left out.
func Keys(in []byte) (keys []Key, rest []byte) {
	for len(in) > 0 {
		if in[0] != 0x1b {
			keys = append(keys, Key(in[0]))
			in = in[1:]
			continue
		}
		n := sequenceLen(in)
		if n == 0 {
			return keys, in
		}
		if n > 2 {
			if k, ok := sequences[string(in[2:n])]; ok {
				keys = append(keys, k)
			}
		}
		in = in[n:]
	}
	return keys, nil
}

// sequenceMax bounds the bytes of a sequence, so that bytes which only look like one are dropped.
const sequenceMax = 16

// sequenceLen returns the length of the escape sequence at the start of in, or 0 if it is not
// complete.
func sequenceLen(in []byte) int {
	if len(in) < 2 {
		return 0
	}
	switch in[1] {
	case 'O':
		if len(in) >= 3 {
			return 3
		}
		return 0
	case '[':
		for i := 2; i < len(in); i++ {
			if in[i] >= 0x40 && in[i] <= 0x7e || i == sequenceMax {
				return i + 1
			}
		}
		return 0
	}
	return 1 // the key ESC itself, and then another key
}
