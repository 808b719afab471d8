{{/* Name of the release's objects. */}}
{{- define "jetcapture.name" -}}
{{- if contains "jetcapture" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-jetcapture" (.Release.Name | trunc 29 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "jetcapture.selector" -}}
app.kubernetes.io/name: jetcapture
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "jetcapture.labels" -}}
{{ include "jetcapture.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "jetcapture.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "jetcapture.name" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* The configuration file. */}}
{{- define "jetcapture.config" -}}
{{ toYaml .Values.config }}
{{- end -}}

{{/* Port of config.http.listen. */}}
{{- define "jetcapture.port" -}}
{{- regexFind "[0-9]+$" .Values.config.http.listen -}}
{{- end -}}

{{/* Whole seconds, rounded up, of a duration such as 1h30m, 500ms or 90. */}}
{{- define "jetcapture.seconds" -}}
{{- if not (kindIs "string" .) -}}
{{- ceil (float64 .) | int64 -}}
{{- else if regexMatch "^[0-9.]+$" . -}}
{{- ceil (float64 .) | int64 -}}
{{- else if not (regexMatch "^([0-9.]+(ms|[dhms]))+$" .) -}}
{{- fail (printf "config: expected a duration such as 90s or 15m, got %s" .) -}}
{{- else -}}
{{- $units := dict "d" 86400.0 "h" 3600.0 "m" 60.0 "s" 1.0 "ms" 0.001 -}}
{{- $sum := 0.0 -}}
{{- range regexFindAll "[0-9.]+(ms|[dhms])" . -1 -}}
{{- $sum = addf $sum (mulf (float64 (regexFind "^[0-9.]+" .)) (get $units (regexFind "[a-z]+$" .))) -}}
{{- end -}}
{{- ceil $sum | int64 -}}
{{- end -}}
{{- end -}}

{{/* Whole MiB, rounded up, of a size such as 1GiB, 500MB or 1048576. */}}
{{- define "jetcapture.mebibytes" -}}
{{- if not (kindIs "string" .) -}}
{{- ceil (divf (float64 .) 1048576.0) | int64 -}}
{{- else if not (regexMatch "^[0-9.]+(B|[Kk]B|[MGT]B|[KMGT]iB)?$" .) -}}
{{- fail (printf "config: expected a size such as 512MiB or 1GiB, got %s" .) -}}
{{- else -}}
{{- $units := dict "" 1.0 "B" 1.0 "KB" 1e3 "kB" 1e3 "MB" 1e6 "GB" 1e9 "TB" 1e12 "KiB" 1024.0 "MiB" 1048576.0 "GiB" 1073741824.0 "TiB" 1099511627776.0 -}}
{{- ceil (divf (mulf (float64 (regexFind "^[0-9.]+" .)) (get $units (regexFind "[A-Za-z]*$" .))) 1048576.0) | int64 -}}
{{- end -}}
{{- end -}}

{{/* Longest time, in seconds, that a message waits in its block. */}}
{{- define "jetcapture.maxAge" -}}
{{- $block := .Values.config.block | default dict -}}
{{- include "jetcapture.seconds" ($block.max_age | default $block.interval | default "15m") -}}
{{- end -}}

{{- define "jetcapture.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch  # not every object of a large local archive at every start
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "jetcapture.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* What captures and jobs mount. */}}
{{- define "jetcapture.volumeMounts" -}}
- {name: config, mountPath: /etc/jetcapture, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- range $index, $secret := .Values.secrets }}
- {name: secret-{{ $index }}, mountPath: {{ $secret.mountPath | quote }}, readOnly: true}
{{- end }}
{{- if .Values.claim }}
- {name: archive, mountPath: /var/lib/jetcapture}
{{- end }}
{{- end -}}

{{- define "jetcapture.volumes" -}}
- name: config
  configMap: {name: {{ include "jetcapture.name" . }}}
- name: tmp
  emptyDir: {}
{{- range $index, $secret := .Values.secrets }}
- name: secret-{{ $index }}
  secret: {secretName: {{ $secret.name | quote }}, defaultMode: 0440}
{{- end }}
{{- with .Values.claim }}
- name: archive
  persistentVolumeClaim: {claimName: {{ . | quote }}}
{{- end }}
{{- end -}}

{{- define "jetcapture.scheduling" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end -}}
